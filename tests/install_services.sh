#!/bin/sh
# Installs what the tests need beside Python: RabbitMQ, bubblewrap and, in CI, Docker Engine and Podman.
# Says what is missing where it may not.
missing=""
[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || missing="$missing rabbitmq-server"
command -v bwrap >/dev/null || missing="$missing bubblewrap"
# The tests start engines of their own, which takes root. A person's machine gets no container engine unasked: without
# one those tests are skipped, and counted.
if [ "$(id -u)" = 0 ] && [ -n "$CI" ]; then
    command -v dockerd >/dev/null || missing="$missing docker.io"
    command -v podman >/dev/null || missing="$missing podman"
    command -v runc >/dev/null || missing="$missing runc"
fi
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing$missing ..."
    # shellcheck disable=SC2086
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing >/dev/null && exit 0
fi
echo "missing:$missing. Tests that need it are skipped; install it with: apt-get install$missing" >&2
[ -z "$CI" ]
