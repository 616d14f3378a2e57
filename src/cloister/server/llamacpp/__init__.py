"""llama.cpp's own API (its tools/server/README.md), beside the OpenAI one that it has too."""
