// Reads an answer out to screen readers: whole sentences, and not more often than every few seconds.

const PAUSE_MS = 2500;

/** Puts text into a live region in portions. */
export class Announcer {
  constructor(region) {
    this.region = region;
    this.said = 0;
    this.lastMs = -Infinity;
  }

  /** Says something now. */
  say(text) {
    this.region.textContent = text;
  }

  /** Begins an answer, or goes on with one of which so many characters were said. */
  begin(said = 0) {
    this.said = said;
    this.lastMs = performance.now();
    this.say("Answering.");
  }

  /** Takes the whole answer as far as it is known; says the sentences that are new, when it is time. */
  follow(text) {
    const nowMs = performance.now();
    const end = endOfSentence(text);
    if (nowMs - this.lastMs < PAUSE_MS || end <= this.said) return;
    this.say(text.slice(this.said, end));
    this.said = end;
    this.lastMs = nowMs;
  }

  /** Ends an answer: says the rest, and how it ended. */
  end(text, ending) {
    this.say(`${text.slice(this.said)} ${ending}`.trim());
    this.said = text.length;
  }
}

function endOfSentence(text) {
  return Math.max(...[". ", "! ", "? ", "\n"].map((mark) => text.lastIndexOf(mark) + 1));
}
