#!/usr/bin/env bash
# Builds the Docker image that `python -m scripts.bench sandbox` runs everything in: ours, docker exec and SWE-ReX.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [ "${1:-}" = "--help" ] || [ "${1:-}" = "-h" ]; then
    cat <<'HELP'
Builds the image of the sandbox benchmark, without an image registry.

    sudo bash scripts/build_bench_image.sh [--rebuild] [NAME]      NAME is agentgrad-bench:1 unless given

It holds a minimal Debian or Ubuntu of this machine's own release (debootstrap, from the mirror that apt uses) with
python3, and SWE-ReX with its dependencies, which pip of this checkout's .venv fetches in the versions of
constraints/bench.txt. It takes about a minute; an image that is there already is kept unless --rebuild is given.
It needs root, a Docker daemon that you may use (DOCKER_HOST is respected), and the package debootstrap.
HELP
    exit 0
fi

say() { printf 'build_bench_image: %s\n' "$*"; }
die() { printf 'build_bench_image: %s\n' "$*" >&2; exit 1; }

rebuild=false
if [ "${1:-}" = "--rebuild" ]; then rebuild=true; shift; fi
image="${1:-agentgrad-bench:1}"
pip=("${PYTHON:-$root/.venv/bin/python}" -m pip --disable-pip-version-check)

docker version >/dev/null 2>&1 ||
    die "no Docker daemon answers: start it (sudo dockerd, or systemctl start docker), or set DOCKER_HOST"
if ! $rebuild && docker image inspect "$image" >/dev/null 2>&1; then
    say "$image is there already (--rebuild makes it anew)"
    exit 0
fi
[ "$(id -u)" = 0 ] || die "debootstrap needs root: sudo bash scripts/build_bench_image.sh"
command -v debootstrap >/dev/null || die "debootstrap is missing: apt-get install -y debootstrap"
"${pip[@]}" --version >/dev/null 2>&1 || die "no pip at ${pip[0]}: bash scripts/setup.sh makes it"

# What apt itself uses, so that nothing else has to be reached.
suite="$(. /etc/os-release && echo "${VERSION_CODENAME:-}")"
[ -n "$suite" ] || die "/etc/os-release names no release; this needs Debian or Ubuntu"
mirror="$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
    awk -v suite="$suite" '$1 == suite && $2 == "main" { print $3; exit }')"
[ -n "$mirror" ] || die "apt has no source for $suite main: run apt-get update first"

folder="$(mktemp -d)"
trap 'rm -rf --one-file-system "$folder"' EXIT
tree="$folder/root"

say "debootstrap $suite"
debootstrap --variant=minbase --include=python3 "$suite" "$tree" "$mirror" >"$folder/log" 2>&1 ||
    die "debootstrap failed: $(tail -n 3 "$folder/log" | tr '\n' ' ')"
version="$(chroot "$tree" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
packages="$tree/usr/local/lib/python$version/dist-packages"

say "SWE-ReX for Python $version"
"${pip[@]}" install --quiet --no-input --no-compile --target "$packages" --python-version "$version" \
    --implementation cp --only-binary=:all: --constraint "$root/constraints/bench.txt" swe-rex \
    >"$folder/log" 2>&1 || die "pip failed: $(tail -n 3 "$folder/log" | tr '\n' ' ')"
# The sandbox cannot write byte code; without it, each start of the server would compile everything again.
chroot "$tree" python3 -m compileall -q "${packages#"$tree"}" >/dev/null || true
chroot "$tree" python3 -c 'import swerex.server' >"$folder/log" 2>&1 ||
    die "SWE-ReX does not start in the image: $(tail -n 1 "$folder/log")"

rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/* "$tree"/usr/share/{doc,man,locale}
mkdir -p "$tree/app"
chmod 1777 "$tree/app"
say "docker import"
tar -C "$tree" --one-file-system --numeric-owner -c . |
    docker import --change 'ENV PATH=/usr/local/bin:/usr/bin:/bin' --change 'WORKDIR /app' --change 'CMD ["sh"]' \
        - "$image" >/dev/null
say "built $image"
