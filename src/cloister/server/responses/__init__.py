"""The Responses API of OpenAI: a conversation in typed items. Nothing is kept between two requests."""
