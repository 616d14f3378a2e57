#!/usr/bin/env bash
# A whole private cloud on this machine, to try it: log, two witnesses, issuer, two nodes, gateway, relay, and the local proxy.
#
#   .venv/bin/pip wheel --no-deps --wheel-dir dist .    # once, after `make serve`: what a release names
#   examples/private_cloud.sh [DIRECTORY]               # then, in a second terminal: curl http://127.0.0.1:8080/v1/models
#
# Everything that different people must run is run by one here, and no hardware vouches for the nodes. So it shows how the parts
# fit together; it protects nobody from who owns this machine, and the proxy says so (NOT PROVED).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command -v cloister >/dev/null || PATH=$root/.venv/bin:$PATH # what `make serve` made
command -v cloister >/dev/null || { echo "there is no program cloister; run \`make serve\` once" >&2; exit 2; }
here=${1:-$(mktemp -d)}
wheel=${WHEEL:-$(ls dist/cloister-*.whl 2>/dev/null | tail -1 || true)}
model=${MODEL:-cloister-5m}
port=${PORT:-9000} # this one and the eight above it
[ -n "$wheel" ] || { echo "no wheel in dist/; make one: $(dirname "$(command -v cloister)")/pip wheel --no-deps --wheel-dir dist ." >&2; exit 2; }
[ ! -e "$here/log.key" ] || { echo "$here has the keys of an earlier cloud; delete it, or name another directory" >&2; exit 2; }
mkdir -p "$here" && cd "$here" && wheel=$(cd "$OLDPWD" && realpath "$wheel")

pids=()
declare -A pid_of
finish() { # every way out leads here, once; a shell that waits for nothing in the foreground hears signals at once
  local status=$?
  trap - EXIT INT TERM HUP
  kill "${pids[@]}" 2>/dev/null || true
  wait || true
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
run() { # NAME COMMAND...: starts a program; what it says is in NAME.log
  local name=$1; shift
  "$@" >"$name.log" 2>&1 & pids+=($!)
  pid_of[$name]=$!
}
await() { # NAME URL: until it answers, or has ended
  for _ in $(seq 240); do
    curl -sf -o /dev/null "$2" && return
    kill -0 "${pid_of[$1]}" 2>/dev/null || { echo "$1 ended; the last lines of $PWD/$1.log:" >&2; tail -5 "$1.log" >&2; exit 1; }
    sleep 0.5
  done
  echo "$1 does not answer; see $PWD/$1.log" >&2; exit 1
}

echo "keys, log and release in $here"
log_key=$(cloister log key log.test --out log.key)
release_key=$(cloister log key release.test --role release --out release.key)
witness_keys=() ; for n in 1 2; do witness_keys+=("$(cloister log key "witness$n.test" --role witness --out "witness$n.key")"); done
issuer_key=$(cloister log key issuer.test --role issuer --out issuer.key)
cloister log trust --log "$log_key" --release "$release_key" --witness "${witness_keys[0]}" --witness "${witness_keys[1]}" \
  --issuer "http://127.0.0.1:$((port + 3))" --issuer-key "$issuer_key" > trust.json
members=() ; for n in 4 5; do members+=(--member "$(cloister log key "node$n.test" --role node --out "node$n.key")"); done
cloister log init log --key log.key >/dev/null # it prints the log's public key, which trust.json has
python -m pip freeze > lock.txt # a release that others rely on: cloister release lock WHEEL, which asks the package index
path=$(python - "$model" <<'PY'
import sys
from cloister.models.location import locate
print(locate(sys.argv[1]))
PY
)
serving=(--max-num-seqs 4 --max-model-len 2048) # settings of nodes are part of the release
digest=$(cloister release make --number 1 --wheel "$wheel" --lock lock.txt --model "$path" --key release.key --out release -- "${serving[@]}")
cloister log add log release/release.entry --manifest release/manifest.json --key log.key >/dev/null
cloister release members --number 1 --log "$log_key" "${members[@]}" --after-s 0 --key release.key --out members.entry
cloister log add log members.entry --key log.key >/dev/null
for n in 1 2; do # the first checkpoint is cosigned by hand; the gateway asks for the others
  cloister witness cosign log --key "witness$n.key" --log "$log_key" --state "witness$n" >> cosignatures
done
cat cosignatures >> log/checkpoint

echo "programs"
for n in 1 2; do
  run "witness$n" cloister witness serve --key "witness$n.key" --log "$log_key" --state "witness$n" --port $((port + n))
done
cloister keys add you --file api-keys.json > api-key 2>/dev/null
cloister issuer --url "http://127.0.0.1:$((port + 3))" --state issuer --key issuer.key --show-keys --out issuer-keys.json
run issuer cloister issuer --url "http://127.0.0.1:$((port + 3))" --state issuer --key issuer.key \
  --api-keys api-keys.json --port $((port + 3))
(umask 077; head -c 32 /dev/urandom | base64 > relay.secret)
nodes=()
for n in 4 5; do
  run "node$n" cloister serve --sealed --attester software --model "$model" --release release --log-checkpoint log/checkpoint \
    --member-key "node$n.key" "${serving[@]}" --port $((port + n))
  nodes+=(--node "http://127.0.0.1:$((port + n))")
done
echo "nodes start, which may take a minute; what they say is in node4.log and node5.log"
for n in 4 5; do await "node$n" "http://127.0.0.1:$((port + n))/.well-known/cloister/evidence"; done
run gateway cloister gateway --url "http://127.0.0.1:$((port + 6))" "${nodes[@]}" --relay-secrets relay.secret \
  --issuer-keys issuer-keys.json --spend-store "sqlite:///$PWD/spent.db" --log log --log-key log.key --trust trust.json \
  --release "$digest" --witness "witness1.test=http://127.0.0.1:$((port + 1))" \
  --witness "witness2.test=http://127.0.0.1:$((port + 2))" --port $((port + 6))
run relay cloister relay --gateway "http://127.0.0.1:$((port + 6))" --secret-file relay.secret \
  --issuer "http://127.0.0.1:$((port + 3))" --port $((port + 7))
await gateway "http://127.0.0.1:$((port + 7))/.well-known/cloister/epoch"

echo "relay at http://127.0.0.1:$((port + 7)); Ctrl-C stops everything"
echo "without the proxy: $(dirname "$(command -v cloister)")/python examples/sealed.py --relay http://127.0.0.1:$((port + 7))" \
  "--trust $PWD/trust.json --api-key-file $PWD/api-key --accept-software"
cloister proxy --relay "http://127.0.0.1:$((port + 7))" --trust trust.json --api-key-file api-key --state view.json \
  --accept-software --port "${PROXY_PORT:-8080}" & pids+=($!)
wait "$!"
