#!/bin/sh
# The `llm` command (pip install llm): a prompt, a stream, a conversation that goes on, --schema.
# Usage: llm_command.sh URL
set -eu
status=0
url=${1:-http://127.0.0.1:8000}
model=$(curl -fsS "$url/v1/models" | python3 -c 'import json,sys; print(json.load(sys.stdin)["data"][0]["id"])')
LLM_USER_PATH=$(mktemp -d)
export LLM_USER_PATH
trap 'rm -rf "$LLM_USER_PATH"' EXIT
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<YAML
- {model_id: local, model_name: $model, api_base: "$url/v1", supports_schema: true, supports_tools: true}
YAML
question="What does the PostgreSQL command VACUUM do?"
check() { # name, then a command whose output says what was seen
  name=$1; shift
  if seen=$("$@" 2>&1); then printf 'llm\t%s\tok: %s\n' "$name" "$seen"
  else status=1; printf 'llm\t%s\tFAILED: %s\n' "$name" "$(printf %s "$seen" | tail -n 1)"; fi
}
ask() { llm -m local "$@" "$question" -o max_tokens 200; }
count() { text=$("$@"); test -n "$text"; echo "${#text} characters"; }
keys() { ask --schema "$1" > "$LLM_USER_PATH/answer"; python3 -c 'import json,sys; print("keys", *sorted(json.load(open(sys.argv[1]))))' "$LLM_USER_PATH/answer"; }
schema='{"type":"object","properties":{"name":{"type":"string","maxLength":10},"age":{"type":"integer"}},"required":["name","age"],"additionalProperties":false}'
check "prompt" count ask --no-stream
check "stream" count ask
check "conversation" count ask -c
check "--schema, JSON" keys "$schema"
# The short form lets other keys follow, and this model adds some until its tokens are spent.
begins() { ask --schema "$1" | tr -d ' \n' | grep -o '^{"age":[0-9]*,"weight":[0-9]*'; }
check "--schema, short form" begins "age int, weight int"
exit $status
