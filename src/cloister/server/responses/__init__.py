"""The Responses API of OpenAI: a conversation in typed items. What is kept between two requests is in `keeping`."""
