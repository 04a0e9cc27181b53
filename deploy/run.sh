#!/usr/bin/env bash
# Start a run, show its log, and end as it ends: for a container, a Job of Kubernetes, or a unit of systemd.
#
#   deploy/run.sh FOLDER "OPTIONS"
#
# FOLDER is that of superlink.sh, which must run. OPTIONS are the text after `flwr run -c`. The exit status is 0 if
# the run has completed, else 1. SIGTERM and Ctrl-C stop the run, which would otherwise go on at the SuperLink.
set -euo pipefail
umask 077
FLWR_HOME=$(CDPATH= cd -- "$1" && pwd)
export FLWR_HOME
app=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)

field() { # a value in the JSON that `flwr` prints
    python -P -c 'import json, sys; found = json.load(sys.stdin); print((found.get("runs") or [found])[0].get(sys.argv[1], ""))' "$1"
}
run='' log='' status='' stopped=''
trap 'stopped=yes; [ -z "$log" ] || kill "$log" 2> /dev/null || true' TERM INT
if ! said=$(flwr run "$app" vfl --format json -c "$2"); then
    echo "$said" >&2
    exit 1
fi
run=$(field run-id <<< "$said")
until [ -n "$stopped" ]; do
    flwr log "$run" vfl --stream & # it may end before the run, if the connection breaks
    log=$!
    wait "$log" || true
    [ -z "$stopped" ] || break
    status=$(flwr list vfl --run-id "$run" --format json | field status)
    case "$status" in finished:*) break ;; esac
    sleep 1
done
if [ -n "$stopped" ]; then
    flwr stop "$run" vfl
    exit 143
fi
echo "Run $run: $status"
[ "$status" = finished:completed ]
