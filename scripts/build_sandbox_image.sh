#!/bin/sh
# Builds the small Docker image that tools run in, from Debian's busybox-static package: no image registry is used.
set -eu

IMAGE="${1:-agentgrad-sandbox:1}"

if [ "$IMAGE" = "--help" ] || [ "$IMAGE" = "-h" ]; then
    cat <<'HELP'
Builds the image that the Docker sandbox uses, without an image registry.

    bash scripts/build_sandbox_image.sh [NAME]      NAME is agentgrad-sandbox:1 unless given

It holds one static busybox (sh, awk, cat, tar, readlink and about 250 more) from Debian's package busybox-static:
the installed one, else one that `apt-get download` fetches. It needs a Debian or Ubuntu machine and a Docker
daemon that you may use; DOCKER_HOST is respected.

Any image with a POSIX shell and awk, readlink and tar (so every usual distribution image) works as well: give its
name to the sandbox instead. It must be on the machine already; nothing is ever pulled.
HELP
    exit 0
fi

fail() {
    echo "build_sandbox_image: $1" >&2
    exit 1
}

docker version >/dev/null 2>&1 ||
    fail "no Docker daemon answers: start it (sudo dockerd, or systemctl start docker), or set DOCKER_HOST"

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
root="$folder/root"
mkdir -p "$root/bin" "$root/etc" "$root/proc" "$root/sys" "$root/dev" "$root/tmp" "$root/app"
chmod 1777 "$root/tmp" "$root/app"

# /bin/busybox alone is no proof: Debian's package busybox has the same file, linked to libraries.
if dpkg-query -W -f '${Status}' busybox-static 2>/dev/null | grep -q "ok installed"; then
    cp /bin/busybox "$root/bin/busybox"
else
    (cd "$folder" && apt-get download busybox-static >/dev/null) ||
        fail "apt-get download busybox-static failed: run apt-get update first"
    dpkg-deb -x "$folder"/busybox-static_*.deb "$folder/package"
    cp "$folder"/package/*/busybox "$root/bin/busybox" 2>/dev/null ||
        cp "$folder"/package/usr/bin/busybox "$root/bin/busybox"
fi
chmod 755 "$root/bin/busybox"

for applet in $("$root/bin/busybox" --list); do
    [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"
done

printf 'root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/app:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"

# The same input gives the same image layer: names sorted, times and owners fixed.
tar -C "$root" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -c . |
    docker import --change 'ENV PATH=/bin' --change 'WORKDIR /app' --change 'CMD ["sh"]' - "$IMAGE" >/dev/null
echo "built $IMAGE"
