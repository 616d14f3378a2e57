#!/bin/sh
# curl: OpenAI's, Anthropic's, Ollama's and llama.cpp's routes, whole and as streams, as their documentation has them.
# Usage: curl_command.sh URL
set -eu
url=${1:-http://127.0.0.1:8000}
status=0
model=$(curl -fsS "$url/v1/models" | python3 -c 'import json,sys; print(json.load(sys.stdin)["data"][0]["id"])')
messages='[{"role": "user", "content": "What does the PostgreSQL command VACUUM do?"}]'
check() { # name, a Python expression about the text of the reply (`text`, and `data` where it is JSON), then curl's arguments
  name=$1 expression=$2; shift 2
  if seen=$(curl -sS --max-time 60 "$@" | python3 -c '
import json, sys
text = sys.stdin.read()
try:
    data = json.loads(text)
except ValueError:
    data = None
seen = eval(sys.argv[1])
assert seen, text[:200]
print(seen if isinstance(seen, str) else "as expected")' "$expression" 2>&1); then printf 'curl\t%s\tok: %s\n' "$name" "$seen"
  else status=1; printf 'curl\t%s\tFAILED: %s\n' "$name" "$(printf %s "$seen" | tail -n 1)"; fi
}

check "chat" 'f"""{data["usage"]["completion_tokens"]} tokens"""' "$url/v1/chat/completions" -H 'Content-Type: application/json' \
  -d "{\"model\": \"$model\", \"messages\": $messages, \"max_tokens\": 16}"
check "chat, stream" 'text.rstrip().endswith("data: [DONE]") and f"""{text.count("data: ")} events"""' -N "$url/v1/chat/completions" \
  -H 'Content-Type: application/json' -d "{\"model\": \"$model\", \"messages\": $messages, \"max_tokens\": 16, \"stream\": true}"
check "completions" 'data["choices"][0]["text"] and data["object"]' "$url/v1/completions" -H 'Content-Type: application/json' \
  -d "{\"model\": \"$model\", \"prompt\": \"VACUUM is\", \"max_tokens\": 8}"
check "responses" 'data["status"]' "$url/v1/responses" -H 'Content-Type: application/json' \
  -d "{\"model\": \"$model\", \"input\": \"Hello\", \"max_output_tokens\": 16}"
check "messages" 'data["stop_reason"]' "$url/v1/messages" -H 'Content-Type: application/json' -H 'anthropic-version: 2023-06-01' \
  -d "{\"model\": \"$model\", \"messages\": $messages, \"max_tokens\": 16}"
check "embeddings" 'f"""{len(data["data"][0]["embedding"])} numbers"""' "$url/v1/embeddings" -H 'Content-Type: application/json' \
  -d "{\"model\": \"$model\", \"input\": \"one\"}"
check "Ollama: generate" 'json.loads(text.splitlines()[-1])["done"] and f"""{len(text.splitlines())} lines"""' "$url/api/generate" \
  -d "{\"model\": \"$model\", \"prompt\": \"Why is the sky blue?\", \"options\": {\"num_predict\": 16}}"
check "llama.cpp: completion" 'data["content"] and data["stop"] and f"""{data["tokens_predicted"]} tokens"""' "$url/completion" \
  -H 'Content-Type: application/json' -d '{"prompt": "Building a website can be done in 10 simple steps:", "n_predict": 16}'
check "llama.cpp: completion, stream" 'json.loads(text.rstrip().splitlines()[-1].removeprefix("data: "))["stop"]' -N "$url/completion" \
  -H 'Content-Type: application/json' -d '{"prompt": "Building a website", "n_predict": 8, "stream": true, "cache_prompt": true}'
check "llama.cpp: apply-template" 'data["prompt"] and f"""{len(data["prompt"])} characters"""' "$url/apply-template" \
  -H 'Content-Type: application/json' -d "{\"messages\": $messages}"
check "llama.cpp: props" 'data["default_generation_settings"]["n_ctx"] and data["chat_template"] and "window and template"' "$url/props"
check "llama.cpp: tokenize and back" 'len(data["tokens"]) > 2' "$url/tokenize" \
  -H 'Content-Type: application/json' -d '{"content": "Hello world!"}'
check "llama.cpp: infill" 'data.get("content") or data["error"]["code"] == "no_infill" and "refused by name: a model without such tokens"' \
  "$url/infill" -H 'Content-Type: application/json' -d '{"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n", "n_predict": 16}'
check "errors" 'data["error"]["message"] and str(data["error"]["code"])' "$url/v1/chat/completions" -H 'Content-Type: application/json' \
  -d '{"model": "no-such-model", "messages": [{"role": "user", "content": "Hi"}]}'
exit $status
