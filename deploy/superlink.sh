#!/usr/bin/env bash
# The label holder's SuperLink: on loopback, behind a proxy that passes the calls of SuperNodes.
#
#   deploy/superlink.sh FOLDER [HOST [OTHER-NAME...]]
#
# FOLDER holds its key and certificate, made at the first start for HOST (127.0.0.1), its data base of
# registered keys and runs, and what `FLWR_HOME=FOLDER flwr run . vfl` needs to be let in.
# PORT in the environment is the port that parties reach (8000); the next is the SuperLink's own.
# CREDENTIALS_DIRECTORY, which systemd and the containers set, may hold superlink.key and superlink.crt. Public
# keys of parties in it (else in FOLDER), *.pub, are registered at each start. FOLDER/serve.token leads to a file
# serve.token in it, so that a service sees each change of that file.
set -euo pipefail
umask 077
folder=$(mkdir -p -m 700 "$1" && CDPATH= cd -- "$1" && pwd)
case "$folder" in *[!A-Za-z0-9/._-]*)
    echo "superlink.sh: name a folder of letters, digits, '.', '_' and '-': nginx reads its path" >&2
    exit 1 ;;
esac
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
host=${2:-127.0.0.1}
port=${PORT:-8000}
inner=$((port + 1))
nginx=$(PATH=$PATH:/usr/sbin:/sbin command -v nginx) || {
    echo "superlink.sh: nginx is missing, which stands before the SuperLink: apt install nginx-light" >&2
    exit 1
}

credentials=${CREDENTIALS_DIRECTORY:-$folder}
own=$credentials/superlink
[ -f "$own.key" ] || own=$folder/superlink
[ -f "$own.crt" ] || python -P -m vfl_flower.transport.nodes.certificates host "$own" "$host" "${@:3}"
[ ! -f "$credentials/serve.token" ] || [ "$credentials" = "$folder" ] || ln -sf "$credentials/serve.token" "$folder/serve.token"

rm -f "$folder"/started/* # runs of run.sh, which ended with the last SuperLink
rm -f "$folder"/loopback.* # nobody else has it, and so it is made anew
python -P -m vfl_flower.transport.nodes.certificates host "$folder/loopback" localhost 127.0.0.1
printf '[superlink]\ndefault = "vfl"\n\n[superlink.vfl]\naddress = "127.0.0.1:%s"\nroot-certificates = "%s"\n' \
    "$inner" "$folder/loopback.crt" > "$folder/config.toml"

listen=0.0.0.0
[ "$host" != 127.0.0.1 ] && [ "$host" != localhost ] || listen=127.0.0.1
mkdir -p "$folder/proxy"
sed -e "s|@FOLDER@|$folder|g" -e "s|@OWN@|$own|g" -e "s|@LISTEN@|$listen|g" -e "s|@PORT@|$port|g" -e "s|@INNER@|$inner|g" \
    "$here/proxy.conf" > "$folder/proxy.conf"

stop() { # both end together
    trap - EXIT
    kill $proxy $link 2> /dev/null || true
    wait
}
proxy= link=
trap stop EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

unset VFL_HOME # the folder holds all that this organisation keeps
export FLWR_HOME=$folder
NO_PROXY=${no_proxy:-${NO_PROXY:-}}
[ "$NO_PROXY" = '*' ] || NO_PROXY=$NO_PROXY,127.0.0.1,localhost # `flwr` below calls this machine
export NO_PROXY
export no_proxy=$NO_PROXY
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 # the packages of this environment serve
python -P -m vfl_flower.transport.nodes.superlink superlink --host 127.0.0.1 --port "$inner" \
    --enable-supernode-auth --database "$folder/superlink.db" --ssl-keyfile "$folder/loopback.key" \
    --ssl-certfile "$folder/loopback.crt" --ssl-ca-certfile "$folder/loopback.crt" &
link=$!
until (exec 3<> "/dev/tcp/127.0.0.1/$inner") 2> /dev/null; do # who reaches the proxy finds it there
    kill -0 $link 2> /dev/null || exit 1
    sleep 0.2
done
for key in "$credentials"/*.pub; do
    [ -f "$key" ] || continue
    said=$(flwr supernode register "$key" vfl 2>&1) || case "$said" in
        *"already in use"*) ;;
        *) printf 'superlink.sh: %s is not registered: %s\n' "$key" "$said" >&2 ;;
    esac
done
"$nginx" -e stderr -p "$folder" -c "$folder/proxy.conf" &
proxy=$!
wait -n $link $proxy
