#!/usr/bin/env bash
# Start a run, show its log, and end as it ends: for a container, a Job of Kubernetes, or a unit of systemd.
#
#   deploy/run.sh FOLDER "OPTIONS"
#
# FOLDER is that of superlink.sh, which must run. OPTIONS are the text after `flwr run -c`. The exit status is 0 if
# the run has completed, else 1. SIGTERM and Ctrl-C stop the run, which would otherwise go on at the SuperLink.
# If this script was killed, its next start with these OPTIONS goes on with the run that it had started. With other
# OPTIONS it first ends a run whose script was killed, if both write to one folder, or are services of one model or
# address. FOLDER/started has a file for each run, which its script holds locked.
set -euo pipefail
umask 077
FLWR_HOME=$(CDPATH= cd -- "$1" && pwd)
export FLWR_HOME
app=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)

field() { # a value in the JSON that `flwr` prints; empty without one
    python -P -c 'import json, sys
try: found = json.load(sys.stdin)
except ValueError: sys.exit()
print((found.get("runs") or [found])[0].get(sys.argv[1], ""))' "$1"
}
claims() { # what a run with these OPTIONS needs for itself, one a line; many runs may read one model
    local names='out|resume|serve-address'
    case "$1" in *task=*serve*) names="$names|model" ;; esac
    case "$1" in *serve-address=*) ;; *task=*serve*) echo "serve-address=''" ;; esac
    { grep -oE "\b($names)=('[^']*'|\"[^\"]*\"|[^ ]+)" <<< "$1" || true; } | sed -E 's/^resume=/out=/'
}
ask() { # set `status`: "lost" if the SuperLink does not know the run; wait while it does not answer
    local said told=''
    status=''
    while [ -z "$stopped" ]; do
        said=$(timeout 60 flwr list vfl --run-id "$1" --format json 2> /dev/null || true)
        case "$said" in *"not found"*) status=lost ;; *) status=$(field status <<< "$said") ;; esac
        [ -z "$status" ] || break
        [ -n "$told" ] || echo "run.sh: the SuperLink does not say how run $1 goes. It is asked again." >&2
        told=yes
        sleep 1
    done
}
run='' log='' status='' stopped='' kept=$FLWR_HOME/started
trap 'stopped=yes; [ -z "$log" ] || kill "$log" 2> /dev/null || true' TERM INT
mkdir -p "$kept"
for file in "$kept"/*; do
    [ -f "$file" ] || continue
    exec 9<> "$file" # no child may hold it open, and so locked
    flock --nonblock 9 || continue # its script lives
    earlier=${file##*/}
    ask "$earlier" 9>&-
    case "$status" in
        '') break ;; # stopped
        finished:* | lost) rm -f "$file"; continue ;;
    esac
    options=$(cat "$file")
    if [ "$options" = "$2" ]; then
        run=$earlier
        echo "Run $run goes on, whose script was killed."
        break
    fi
    grep -qxFf <(claims "$2") <(claims "$options") || continue
    echo "Run $earlier is ended, whose script was killed."
    flwr stop "$earlier" vfl 9>&- || true
    rm -f "$file"
    sleep 15 9>&- # until it has released its folder and its port
done
[ -z "$stopped" ] || exit 143
if [ -z "$run" ]; then
    said=$(flwr run "$app" vfl --format json -c "$2" 9>&- || true)
    run=$(field run-id <<< "$said")
    if [ -z "$run" ]; then
        echo "$said" >&2
        exit 1
    fi
    exec 9> "$kept/.$run"
    flock 9
    printf %s "$2" >&9
    mv "$kept/.$run" "$kept/$run"
fi
until [ -n "$stopped" ]; do
    flwr log "$run" vfl --stream 9>&- & # it may end before the run, if the connection breaks
    log=$!
    wait "$log" || true
    [ -z "$stopped" ] || break
    ask "$run" 9>&-
    case "$status" in finished:* | lost) break ;; esac
    sleep 1 9>&-
done
if [ -n "$stopped" ]; then
    flwr stop "$run" vfl || true
    rm -f "$kept/$run"
    exit 143
fi
rm -f "$kept/$run"
echo "Run $run: $status"
if [ "$status" = finished:stopped ]; then
    echo "The label holder has ended it by \`flwr stop\`. Its log says where its checkpoint is: set the option resume."
fi
[ "$status" = finished:completed ]
