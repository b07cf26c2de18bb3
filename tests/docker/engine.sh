#!/usr/bin/env bash
# A Docker engine with Compose v2 for tests/docker, or the reason why there is none.
#
#   engine.sh find         print the versions of the engine that answers; else say why, and exit 1
#   engine.sh up           find, or install and start one first (Debian, as root)
#   engine.sh base [TAG]   make a base image without a registry: this Debian, Python, torch; then
#                          BASE_IMAGE=TAG make test-docker. TORCH_INDEX is where torch comes from
#   engine.sh down         stop the engine that `up` started
set -euo pipefail
place=${ENGINE_DIRECTORY:-/var/tmp/ringdraft-engine}
here=$(cd "$(dirname "$0")" && pwd)

find_engine() {
    command -v docker >/dev/null || { echo "there is no docker command"; return 1; }
    docker compose version >/dev/null 2>&1 || { echo "docker has no Compose v2"; return 1; }
    docker info >/dev/null 2>&1 || { echo "no Docker engine answers"; return 1; }
    echo "engine $(docker version --format '{{.Server.Version}}'), Compose $(docker compose version --short)"
}

mirror() {
    grep -rhoE '(URIs:|^deb) .*https?://[^ ]+' /etc/apt/sources.list /etc/apt/sources.list.d |
        grep -oE 'https?://[^ ]+/debian/?$' | head -n 1
}

install_engine() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update --quiet=2
    apt-get install --quiet=2 --yes --no-install-recommends docker.io iptables debootstrap >/dev/null
    docker compose version >/dev/null 2>&1 && return
    # Debian 12's own docker-compose is version 1; the plugins of Debian 13 are static programs.
    local next=$place/trixie
    mkdir -p "$next/lists/partial"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(mirror) trixie main" >"$next/sources.list"
    local options=(-o "Dir::Etc::sourcelist=$next/sources.list" -o "Dir::Etc::sourceparts=-"
        -o "Dir::State::lists=$next/lists" -o "APT::Sandbox::User=root")
    apt-get "${options[@]}" update --quiet=2
    (cd "$next" && apt-get "${options[@]}" download --quiet=2 docker-compose docker-buildx)
    for package in "$next"/*.deb; do dpkg --extract "$package" "$next/files"; done
    install -D --target-directory=/usr/local/lib/docker/cli-plugins \
        "$next"/files/usr/libexec/docker/cli-plugins/*
}

start_engine() {
    find_engine >/dev/null && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { find_engine; return 1; }
    mkdir -p "$place"
    command -v dockerd >/dev/null && docker compose version >/dev/null 2>&1 || install_engine
    setsid dockerd --data-root "$place/data" --exec-root "$place/exec" --pidfile "$place/pid" \
        >"$place/log" 2>&1 </dev/null &
    for _ in $(seq 60); do
        docker info >/dev/null 2>&1 && return
        sleep 1
    done
    echo "the engine does not start:" && tail -n 5 "$place/log" && return 1
}

make_base() {
    docker image inspect "$1" >/dev/null 2>&1 && { echo "$1 is there"; return; }
    mkdir -p "$place"
    local root=$place/root wheels=$place/wheels release
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    [ -e "$root/usr/bin/pip3" ] || debootstrap --variant=minbase \
        --include=ca-certificates,g++,python3,python3-dev,python3-pip,python3-venv \
        "$release" "$root" "$(mirror)" >"$place/debootstrap.log"
    # What this machine trusts, and how it finds hosts: builds then reach what the machine reaches.
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    cp /etc/resolv.conf "$root/etc/"
    if ! chroot "$root" python3 -c 'import torch' 2>/dev/null; then
        # Fetched outside, where this machine's own settings of pip hold.
        python3 -m pip download --quiet --only-binary=:all: --no-deps --dest "$wheels" \
            --python-version "$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" \
            ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' "$here/../../constraints.txt")"
        cp "$wheels"/torch-*.whl "$root/tmp/"
        chroot "$root" sh -c 'pip3 install --quiet --no-cache-dir --break-system-packages \
            --root-user-action=ignore --cert=/etc/ssl/certs/ca-certificates.crt /tmp/torch-*.whl numpy'
        rm "$root"/tmp/torch-*.whl
    fi
    tar --directory "$root" --create . | docker import --change \
        'ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_CERT=/etc/ssl/certs/ca-certificates.crt' - "$1"
}

case ${1:-} in
find) find_engine ;;
up) start_engine && find_engine ;;
base) make_base "${2:-ringdraft-base:local}" ;;
down) [ ! -s "$place/pid" ] || kill "$(cat "$place/pid")" ;;
*) sed -n '2,9p' "$0" && exit 2 ;;
esac
