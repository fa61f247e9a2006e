#!/usr/bin/env bash
# Sets up .venv, then lint, types and tests.
#
#     bash scripts/test.sh [pytest arguments]
#
# Lint and types run whatever the arguments are, and a failure there does not keep the tests from running; the
# exit status counts them all. Tests marked slow run where CI=true or with an -m of your own (-m "").
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

# Packages come without byte code: where it may not be written, each process of a test compiles torch and vLLM again.
unset PYTHONDONTWRITEBYTECODE
# Tests load models from folders and write W&B files locally: a look at a hub would be a fault.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=offline
bin="$PWD/.venv/bin"
failed=()

# One line a stage; its output only when it failed.
stage() {
    local name="$1" started output
    shift
    started="$(date +%s)"
    if output="$("$@" 2>&1)"; then
        printf 'test: %-12s ok (%d s)\n' "$name" "$(($(date +%s) - started))"
    else
        printf 'test: %-12s FAILED: %s\n%s\n' "$name" "${*/#"$PWD/"/}" "$output"
        failed+=("$name")
    fi
}

stage lint "$bin/ruff" check .
stage format "$bin/ruff" format --check .
stage types "$bin/basedpyright"
stage imports "$bin/lint-imports" --no-logo

# The caller's -m comes later and wins.
marks=()
if [ "${CI:-}" != true ]; then marks=(-m "not slow"); fi
"$bin/python" -m pytest -q "${marks[@]}" "$@" || failed+=(pytest)

if [ "${#failed[@]}" -gt 0 ]; then
    echo "test: failed: ${failed[*]}"
    exit 1
fi
