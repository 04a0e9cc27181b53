#!/usr/bin/env bash
# A party's SuperNode, which runs the code that is installed here and no other.
#
#   deploy/supernode.sh FOLDER SUPERLINK "NODE-CONFIG"
#
# FOLDER holds the party's key, made at the first start: give supernode.pub to the label holder, which
# registers it. It must hold superlink.crt, which the label holder gives out; and will hold the states
# that the party keeps. SUPERLINK is HOST:PORT. NODE-CONFIG says which party this is, and its file:
#   "partition-id=0 num-partitions=2 file='/data/features.parquet' id='customer'"
# PORT in the environment is a port on this machine that its own ClientApp uses (9094).
# CREDENTIALS_DIRECTORY, which systemd and the containers set, may hold supernode.key and superlink.crt.
set -euo pipefail
umask 077
folder=$(mkdir -p -m 700 "$1" && CDPATH= cd -- "$1" && pwd)

credential() { # the path of a file that lies with the credentials, or in FOLDER
    local given=${CREDENTIALS_DIRECTORY:-$folder}/$1
    if [ -f "$given" ]; then echo "$given"; else echo "$folder/$1"; fi
}
key=$(credential supernode.key)
if [ ! -f "$key" ]; then
    python -P -m vfl_flower.transport.nodes.certificates supernode "$folder"
    echo "made $folder/supernode.pub: start again when the label holder has registered it"
    echo "key for masked sums, for the other parties: $(python -P -m vfl_flower.protocol.aggregation.keys "$folder/vfl-flower")"
    exit
fi
# Where its ClientApp may connect to, if the owner says nothing else: the host of the SuperLink.
config=$3
case " $config" in *" stream-address="*) ;; *) config="$config stream-address='${2%:*}'" ;; esac

unset VFL_HOME # the folder holds all that this organisation keeps
export FLWR_HOME=$folder
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 # the packages of this environment serve
exec python -P -m vfl_flower.transport.nodes.superlink supernode --superlink "$2" \
    --root-certificates "$(credential superlink.crt)" --auth-supernode-private-key "$key" \
    --host 127.0.0.1 --port "${PORT:-9094}" --node-config "$config"
