#!/usr/bin/env bash
# The label holder's SuperLink: TLS, and registered SuperNodes only.
#
#   deploy/superlink.sh FOLDER [HOST]
#
# FOLDER holds its key and certificate, made at the first start for HOST (127.0.0.1), its data base of
# registered keys and runs, and the connection "vfl" that `FLWR_HOME=FOLDER flwr run . vfl` uses.
# PORT in the environment is the port that it listens on (8000).
set -euo pipefail
folder=$(mkdir -p -m 700 "$1" && cd "$1" && pwd)
host=${2:-127.0.0.1}
port=${PORT:-8000}

[ -f "$folder/superlink.crt" ] || python -m vfl_flower.runtimes.certificates superlink "$folder" "$host"
printf '[superlink]\ndefault = "vfl"\n\n[superlink.vfl]\naddress = "%s:%s"\nroot-certificates = "%s"\n' \
    "$host" "$port" "$folder/superlink.crt" > "$folder/config.toml"

listen=0.0.0.0
[ "$host" != 127.0.0.1 ] || listen=127.0.0.1
export FLWR_HOME=$folder
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 # the packages of this environment serve
exec flower-superlink --host "$listen" --port "$port" --enable-supernode-auth \
    --database "$folder/superlink.db" --ssl-keyfile "$folder/superlink.key" \
    --ssl-certfile "$folder/superlink.crt" --ssl-ca-certfile "$folder/superlink.crt"
