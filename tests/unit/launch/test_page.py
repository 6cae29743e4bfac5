"""The page of a run, its charts and its episodes."""

import re
import xml.dom.minidom
from html.parser import HTMLParser

import msgspec
import pytest

from async_search_rl.errors import DataError
from async_search_rl.launch.charts import Series, bar_chart, clock_ticks, line_chart, thinned, ticks, whole_ticks
from async_search_rl.launch.page import page, read_run, write_page
from async_search_rl.launch.page_charts import utilisation
from async_search_rl.launch.transcript import html, load_decoder, segments, versions_text

VOID = {"meta", "br"}


class Balanced(HTMLParser):
    """Raises where a tag closes another than the last open one; collects tags and text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(text):
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_is_well_formed_and_loads_nothing_from_elsewhere(synthetic_run):
    text = write_page(synthetic_run).read_text()
    parser = parsed(text)
    assert not [tag for tag, _ in parser.tags if tag in ("script", "link", "img", "iframe")]
    assert not [value for _, attrs in parser.tags for name, value in attrs.items() if name in ("src", "href")]
    assert not re.search(r"https?://|url\(|@import", text)


def test_the_page_has_every_curve_and_the_headline_figures(synthetic_run):
    text = "".join(parsed(page(read_run(synthetic_run))).text)
    for title in (
        "Exact match", "Reward", "Searches", "Staleness", "Sampled tokens", "Groups", "Policy loss", "Effective sample size",
        "KL(behaviour, current)", "Entropy", "Utilisation", "Processor cores in use", "Held-out questions",
    ):  # fmt: skip
        assert title in text
    assert "0.29 → 0.89" in text
    assert "1.22 → 1.98" in text
    assert "4 min 11" in text


def test_the_learners_strip_follows_the_time_of_each_launch():
    """The second launch came an hour after the first, whose seconds it goes on counting."""
    rest = {"cpu_s": {}, "actors": {}, "search": {}}
    timeline = [{"t": t, "time": 1e6 + t + (3600 if t > 60 else 0), **rest} for t in range(1, 121)]
    learner = [{"time": 1e6 + 50, "step_s": 10.0}, {"time": 1e6 + 3600 + 100, "step_s": 10.0}]
    assert re.findall(r"learner, ([\d:]+): ", utilisation(timeline, learner)) == ["0:40", "1:30"]


def test_text_of_documents_is_escaped_and_episodes_stand_side_by_side(synthetic_run):
    text = page(read_run(synthetic_run))
    assert "<script>" not in text
    assert "&lt;script&gt;alert" in text
    assert text.count('<div class="side">') == 6
    assert text.count('<span class="right">right</span>') == 3
    assert "weights of steps 44 to 45" in text


def test_a_run_without_tokenizer_shows_token_ids_and_says_why(synthetic_run):
    run = read_run(synthetic_run)
    next((synthetic_run.parents[1] / "model").glob("tokenizer.json")).unlink()
    without = read_run(synthetic_run)
    assert without.decode is None
    assert "tokenizer.json must be in" in page(without)
    assert run.decode is not None


def test_a_run_that_trained_nothing_still_has_a_page(synthetic_run):
    run = read_run(synthetic_run)
    summary = {
        **run.summary,
        "outcome": "no <disk> left",
        "evaluations": [],
        "em_start": None,
        "em_end": None,
        "max_lag": None,
        "staleness": {},
    }
    empty = msgspec.structs.replace(run.config, run=msgspec.structs.replace(run.config.run, name="<b>"))
    text = page(type(run)(config=empty, summary=summary, timeline=[], learner=[]))
    parsed(text)
    assert "no &lt;disk&gt; left" in text
    assert "<b></" not in text
    assert "Episodes" not in text


def test_a_folder_without_a_summary_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"must hold the summary\.json"):
        write_page(tmp_path)


def test_segments_know_their_tag_and_who_wrote_them(synthetic_run):
    run = read_run(synthetic_run)
    trajectory = run.after[0].trajectories[0]
    parts = segments(trajectory, run.decode)
    assert parts[0].kind == "prompt"
    kinds = [(part.kind, part.sampled) for part in parts if part.tag]
    search, passages = [("search", True)] * 2, [("information", False)] * 2
    assert kinds == [("think", True)] * 2 + search + passages + search + passages + [("think", True)] * 2 + [("answer", True)] * 2
    passage = next(part for part in parts if part.kind == "information" and not part.tag)
    assert "</search> is not a tag here" in passage.text
    sampled = "".join(part.text for part in parts if part.sampled)
    assert "alert" not in sampled


def test_a_sampled_information_tag_is_the_policys_own_text(synthetic_run):
    run = read_run(synthetic_run)
    trajectory = run.after[0].trajectories[0]
    forged = segments(trajectory, lambda ids: "<information> forged </information>")
    assert all(part.kind != "information" for part in forged if part.sampled)
    assert "&lt;information&gt; forged" in html(forged)


def test_versions_are_told_in_words(synthetic_run):
    run = read_run(synthetic_run)
    assert versions_text(run.before[0].trajectories[0]) == "weights of step 0"
    assert versions_text(run.after[0].trajectories[0]) == "weights of steps 44 to 45"


def test_a_model_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=str(tmp_path)):
        load_decoder(tmp_path)


def test_charts_are_valid_xml_leave_gaps_and_escape_names():
    chart = line_chart(
        [Series("a<b", "c1", [(0, 1.0), (1, None), (2, 3.0), (3, float("nan"))], marked=True), Series("other", "c2", [(0, 2.0)])]
    )
    svg, _, rest = chart.partition("</svg>")
    xml.dom.minidom.parseString(svg + "</svg>")
    assert re.search(r'd="M[\d. ]+M[\d. ]+"', svg)
    assert "a&lt;b" in svg
    assert "legend" in rest
    xml.dom.minidom.parseString(bar_chart([("0", 3.0), ("1", 0.0)]))


def test_a_chart_without_data_is_empty():
    assert line_chart([Series("a", "c1", [(0, None)])]) == ""
    assert bar_chart([]) == ""


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.29, 0.93), (-3e-5, 7e-5), (1200, 1900), (5, 5)])
def test_ticks_are_few_round_and_inside(low, high):
    found = ticks(low, high)
    assert 1 <= len(found) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)


def test_close_values_get_different_labels():
    chart = line_chart([Series("ess", "c3", [(1, 0.9991), (2, 0.9996), (3, 1.0)])])
    labels = re.findall(r'text-anchor="end">([^<]*)<', chart)
    assert len(labels) == len(set(labels)) >= 2


def test_steps_are_labelled_by_whole_numbers():
    assert whole_ticks(1, 2) == [1.0, 2.0]


def test_clock_ticks_are_whole_minutes_for_minutes():
    assert clock_ticks(0, 250) == [0, 60, 120, 180, 240]


def test_thinning_keeps_the_mean_and_the_gaps():
    points = [(float(x), None if x >= 500 else 2.0) for x in range(1000)]
    thin = thinned(points, 10)
    assert len(thin) == 10
    assert [y for _, y in thin] == [2.0] * 5 + [None] * 5
