#!/usr/bin/env bash
# Sets up .venv, then trains a small model to use tools and shows what it learned: data → SFT → GRPO → evaluation →
# runs/quickstart/report.html. No GPU, no key, and no network beyond package installs.
#
#     bash scripts/quickstart.sh [arguments of scripts/quickstart.py]
#     bash scripts/quickstart.sh            # a second start goes on where the first one stopped
#
# AGENTGRAD_EXTRA=cpu|gpu chooses the build of vLLM; otherwise gpu where nvidia-smi answers, else cpu.
set -euo pipefail

for argument in "$@"; do
    if [ "$argument" = -h ] || [ "$argument" = --help ]; then
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
    fi
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --require-sandbox
exec .venv/bin/python -m scripts.quickstart "$@"
