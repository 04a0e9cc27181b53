#!/usr/bin/env bash
# A SuperLink and a SuperNode for each party on this machine, as on several, until it is ended.
#
#   deploy/try_here.sh FOLDER "file='/data/a.parquet' id='customer'" "file='/data/b.csv'" ...
#
# Each party is given by what its node configuration says besides its number. Then
#   FLWR_HOME=FOLDER/superlink flwr run . vfl --stream -c "..."
set -euo pipefail
umask 077
folder=$(mkdir -p -m 700 "$1" && CDPATH= cd -- "$1" && pwd)
shift
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
export PORT=${PORT:-8000}
superlink=127.0.0.1:$PORT

# SuperNodes first: they sign off at the SuperLink, which else refuses their keys for a minute.
stop() {
    trap - EXIT
    for each in $nodes $link; do
        kill "$each" 2> /dev/null || true
        wait "$each" 2> /dev/null || true
    done
}
nodes= link=
trap stop EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
set -m # Ctrl-C ends this script alone, and so the others in this order

"$here/superlink.sh" "$folder/superlink" > "$folder/superlink.log" 2>&1 &
link=$!
for _ in $(seq 120); do
    (exec 3<> "/dev/tcp/127.0.0.1/$PORT") 2> /dev/null && break
    kill -0 "$link" 2> /dev/null || break
    sleep 0.5
done
kill -0 "$link" 2> /dev/null || { tail -n 5 "$folder/superlink.log"; exit 1; }

party=0
for words in "$@"; do
    mine=$folder/party-$party
    if [ ! -f "$mine/supernode.key" ]; then
        "$here/supernode.sh" "$mine" "$superlink" ""
        FLWR_HOME=$folder/superlink flwr supernode register "$mine/supernode.pub" vfl
    fi
    cp "$folder/superlink/superlink.crt" "$mine/"
    : > "$folder/party-$party.log"
    PORT=$((PORT + 2 + party)) "$here/supernode.sh" "$mine" "$superlink" \
        "$words partition-id=$party num-partitions=$#" > "$folder/party-$party.log" 2>&1 &
    nodes="$nodes $!"
    party=$((party + 1))
done
party=0
for node in $nodes; do
    until grep -q "SuperNode ID" "$folder/party-$party.log"; do
        kill -0 "$node" 2> /dev/null || { cat "$folder/party-$party.log"; exit 1; }
        sleep 0.5
    done
    party=$((party + 1))
done
echo "$# parties; to run: FLWR_HOME=$folder/superlink flwr run . vfl --stream -c \"...\""
wait
