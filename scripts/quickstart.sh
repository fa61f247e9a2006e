#!/usr/bin/env bash
# Sets up .venv, then trains a small model to use tools and shows what it learned: data → SFT → GRPO → evaluation →
# runs/quickstart/report.html. No GPU, no key, and no network beyond package installs.
#
#     bash scripts/quickstart.sh [--seed N] [--output_dir FOLDER] [--configs NAME] [--sandbox KIND]
#     bash scripts/quickstart.sh            # a second start goes on where the first one stopped
#
# --seed N                seed of every stage (0)
# --output_dir FOLDER     where everything goes (runs/quickstart); a folder holds one run
# --configs NAME          which configs/*_NAME.toml: quickstart (the default) or smollm2
# --sandbox KIND          bubblewrap, docker or auto (bubblewrap where it works, else auto)
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
