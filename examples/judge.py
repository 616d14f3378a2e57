"""Judge answers by score: `python examples/judge.py` ranks candidate answers to a question, the best first.

Two scores: how likely the model finds the answer (mean log-probability of its tokens after the question, natural
logarithm), and how alike it is to a reference answer (cosine of their vectors).
"""

from __future__ import annotations

import argparse

from cloister import LLM, SamplingParams

QUESTION = "What is the Python module json?"
REFERENCE = "Encode and decode the JSON format."
CANDIDATES = ("Write and read JSON data.", "Encode and decode the JSON format.", "A list of numbers.", "Run other programs.")
PROMPT = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def score_likelihood(llm: LLM, question: str, answers: list[str]) -> list[float]:
    """Returns the mean log-probability of each answer's tokens, given the question."""
    asked = [{"role": "user", "content": question}]
    beginning = llm.render(asked)
    prompts = [beginning + llm.tokenizer.encode(answer) for answer in answers]
    scores = []
    for completion in llm.generate(prompts, PROMPT):
        entries = [entry.logprob for entry in (completion.prompt_logprobs or [])[len(beginning) :] if entry is not None]
        scores.append(sum(entries) / len(entries))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--reference", default=REFERENCE)
    parser.add_argument("answers", nargs="*", default=list(CANDIDATES))
    parser.add_argument("--model", default="cloister-5m")
    chosen = parser.parse_args()
    with LLM(chosen.model) as llm:
        likelihoods = score_likelihood(llm, chosen.question, chosen.answers)
        likenesses = llm.score(chosen.reference, chosen.answers)
    print("log-probability  cosine  answer")
    for likelihood, likeness, answer in sorted(zip(likelihoods, likenesses, chosen.answers, strict=True), reverse=True):
        print(f"{likelihood:15.3f}  {likeness:6.3f}  {answer}")


if __name__ == "__main__":
    main()
