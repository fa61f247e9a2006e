#!/usr/bin/env bash
# What the tests need beside Python, on a fresh Debian machine, as root: the packages, a Docker daemon that answers, and
# the image of the sandbox. Safe to run again; what is there already is kept.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export DEBIAN_FRONTEND=noninteractive
log="${DOCKERD_LOG:-/tmp/dockerd.log}"
wait_s=60

missing=()
for package in docker.io bubblewrap busybox-static; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

answers() { timeout 5 docker version >/dev/null 2>&1; }

# There may be no init system that starts the daemon. Where packets cannot be filtered it starts without a network,
# which no sandbox has anyway.
start_and_wait() {
    setsid nohup dockerd "$@" >>"$log" 2>&1 </dev/null &
    local daemon=$! waited=0
    until answers; do
        sleep 1
        waited=$((waited + 1))
        if ! kill -0 "$daemon" 2>/dev/null || [ "$waited" -ge "$wait_s" ]; then
            kill "$daemon" 2>/dev/null || true
            wait "$daemon" 2>/dev/null || true
            return 1
        fi
    done
}

answers || start_and_wait || start_and_wait --iptables=false --ip6tables=false --bridge=none || {
    echo "services: dockerd does not answer; the end of $log:" >&2
    tail -n 20 "$log" >&2
    exit 1
}

docker image inspect agentgrad-sandbox:1 >/dev/null 2>&1 || bash scripts/build_sandbox_image.sh
echo "services: docker $(docker version --format '{{.Server.Version}}'), $(bwrap --version)"
