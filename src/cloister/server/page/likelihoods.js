// What else a model could have said: the log-probabilities of an answer's tokens. Pure.

/**
 * Returns the tokens of an exchange that was asked for log-probabilities, else nothing: lists of text, likelihood from 0 to 1, and the
 * likeliest tokens at that place as pairs of text and likelihood.
 */
export function likelihoodsOf(exchange) {
  const choices = (exchange?.response ?? []).map((chunk) => chunk.choices?.find(({ index }) => !index));
  return choices.flatMap((choice) => choice?.logprobs?.content ?? []).map(read);
}

/** Returns a likelihood in words: "83%", "under 0.1%", "over 99.9%". */
export function percentOf(likelihood) {
  if (likelihood > 0.999 && likelihood < 1) return "over 99.9%";
  if (likelihood < 0.001) return "under 0.1%";
  return `${(likelihood * 100).toFixed(likelihood < 0.1 ? 1 : 0)}%`;
}

function read({ token, logprob, top_logprobs: top }) {
  return { text: token, likelihood: Math.exp(logprob), others: (top ?? []).map((other) => [other.token, Math.exp(other.logprob)]) };
}
