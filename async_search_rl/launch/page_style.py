"""The style sheet of a run's page: light and dark, no font or file from elsewhere."""

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f5f2; --card: #ffffff; --ink: #16181d; --soft: #5d626d; --faint: #8b909b; --line: #e6e4de; --track: #efede8;
  --c1: #2a6fdb; --c2: #e0632f; --c3: #149a6c; --c4: #c98a00; --c5: #6b4fc4; --c6: #c4457f;
  --idle: #e0632f; --stall: #c98a00; --good: #149a6c;
  --think: #6d7280; --search: #2a6fdb; --info: #0f7f5c; --info-bg: #eaf6f1; --answer: #9a5b00; --answer-bg: #fff2d6; }
@media (prefers-color-scheme: dark) { :root {
  --page: #131417; --card: #1c1e22; --ink: #eceef2; --soft: #a6abb6; --faint: #7b808b; --line: #2c2f35; --track: #25282d;
  --c1: #6aa3ff; --c2: #ff8a5c; --c3: #3ccf9b; --c4: #ecb443; --c5: #a58cff; --c6: #f17bb0;
  --idle: #ff8a5c; --stall: #ecb443; --good: #3ccf9b;
  --think: #9aa0ac; --search: #7fb0ff; --info: #62d6ac; --info-bg: #17302a; --answer: #ffcf75; --answer-bg: #3a2e12; } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 80px }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 6px 14px; margin-bottom: 22px }
h1 { font-size: 28px; letter-spacing: -.02em; margin: 0 }
h2 { font-size: 19px; letter-spacing: -.01em; margin: 44px 0 14px }
h3 { font-size: 14px; font-weight: 600; margin: 0 0 2px }
.badge { font-size: 12px; font-weight: 600; padding: 2px 10px; border-radius: 99px; color: #fff; background: var(--good) }
.badge.bad { background: var(--c2) }
.soft { color: var(--soft) } .faint { color: var(--faint); font-size: 13px }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px }
.tile b { display: block; font-size: 25px; line-height: 1.25; letter-spacing: -.02em; font-weight: 650;
  font-variant-numeric: tabular-nums;
  white-space: nowrap }
.tile i { font-style: normal; color: var(--faint); font-weight: 500; font-size: 20px } .tile .faint { display: block }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 14px }
  .wide { grid-column: 1 / -1 }
svg { display: block; width: 100%; height: auto; overflow: visible } svg text { font-size: 12px; fill: var(--faint) }
svg text.value { fill: var(--soft); font-weight: 600 }
.grid { stroke: var(--line) } .track { fill: var(--track) } .line { fill: none; stroke-width: 2; stroke-linejoin: round }
.dot { stroke: var(--card); stroke-width: 1.5 } .dot.hidden { opacity: 0 } .dot.hidden:hover { opacity: 1 }
.line.c1 { stroke: var(--c1) } .line.c2 { stroke: var(--c2) } .line.c3 { stroke: var(--c3) } .line.c4 { stroke: var(--c4) }
.line.c5 { stroke: var(--c5) } .line.c6 { stroke: var(--c6) }
.dot.c1, .bar.c1, rect.c1 { fill: var(--c1) } .dot.c2, .bar.c2, rect.c2 { fill: var(--c2) }
  .dot.c3, .bar.c3, rect.c3 { fill: var(--c3) }
.dot.c4, .bar.c4, rect.c4 { fill: var(--c4) } .dot.c5, .bar.c5, rect.c5 { fill: var(--c5) }
  .dot.c6, .bar.c6, rect.c6 { fill: var(--c6) }
rect.idle { fill: var(--idle) } rect.stall { fill: var(--stall) }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-top: 4px; font-size: 12.5px; color: var(--soft) }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px }
i.c1 { background: var(--c1) } i.c2 { background: var(--c2) } i.c3 { background: var(--c3) } i.c4 { background: var(--c4) }
i.c5 { background: var(--c5) } i.c6 { background: var(--c6) } i.idle { background: var(--idle) }
  i.stall { background: var(--stall) }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px }
th { text-align: right; font-weight: 500; color: var(--faint); font-size: 12.5px } th, td { padding: 5px 10px;
  border-bottom: 1px solid var(--line) }
td { text-align: right } th:first-child, td:first-child { text-align: left } tr:last-child td { border-bottom: 0 }
.scroll { overflow-x: auto }
.episode { margin-bottom: 14px } .episode > h3 { font-size: 16px; margin-bottom: 2px }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 18px; margin-top: 12px }
.side { min-width: 0 } .side .head { display: flex; justify-content: space-between; gap: 8px; font-size: 12.5px;
  color: var(--faint);
  border-bottom: 1px solid var(--line); padding-bottom: 5px; margin-bottom: 8px }
.right { color: var(--good); font-weight: 600 } .wrong { color: var(--c2); font-weight: 600 }
.text { font: 13px/1.7 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere }
.text .block { margin: 3px 0; padding: 3px 10px; border-left: 3px solid transparent; border-radius: 0 6px 6px 0 }
.text .sampled { text-decoration: underline; text-decoration-thickness: 1.5px; text-underline-offset: 4px;
  text-decoration-color: color-mix(in srgb, currentColor 40%, transparent) }
.text .prompt { color: var(--faint) } .text .think { color: var(--think); font-style: italic }
.text .search { color: var(--search) }
.text .information { color: var(--info); background: var(--info-bg); border-left-color: var(--info) }
.text .answer { color: var(--answer); background: var(--answer-bg); border-left-color: var(--answer); font-weight: 600 }
.text .tag { opacity: .6; font-weight: 400 } .text summary { cursor: pointer }
.keys span { margin-right: 14px } .keys .box { padding: 1px 8px; border-radius: 4px }
.line.few { stroke-dasharray: 3 5 }
.note { border-left: 3px solid var(--c2); padding: 8px 14px; margin: 0 0 18px; background: var(--card);
  border-radius: 0 8px 8px 0 }
"""
