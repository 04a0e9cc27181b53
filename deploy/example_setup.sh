#!/usr/bin/env bash
# Make what compose.yaml starts from, at the first start: files, keys, a certificate and a token.
#
#   deploy/example_setup.sh FOLDER
#
# FOLDER has bank, party-0 and party-1 for files, and a folder *-secrets for each. It stands for what organisations
# do apart from each other: each makes its own keys, and gives only superlink.crt and supernode.pub to the others.
set -euo pipefail
umask 077
cd -- "$1"
here=$OLDPWD/$(dirname -- "$0")
bank='bank-secrets'
[ ! -f $bank/serve.token ] || exit 0
rm -f -- *-secrets/* # of a start that was cut short

python -P "$here/example_files.py" .
python -P -m vfl_flower.transport.nodes.certificates host $bank/superlink label-holder localhost
for party in party-0 party-1; do
    python -P -m vfl_flower.transport.nodes.certificates supernode $party-secrets
    cp $bank/superlink.crt $party-secrets/
    cp $party-secrets/supernode.pub $bank/$party.pub
done
python -P -c 'import secrets; print("example", secrets.token_urlsafe(32))' > $bank/serve.token
