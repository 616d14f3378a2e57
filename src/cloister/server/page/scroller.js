// Keeps a reader at the end of what grows, unless the reader scrolled up.

const NEAR_PX = 80;

export class Scroller {
  /** @param latest the button that leads back to the end. */
  constructor(element, latest) {
    this.element = element;
    this.latest = latest;
    element.addEventListener("scroll", () => this.show(), { passive: true });
    latest.addEventListener("click", () => this.toEnd());
  }

  get isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    return scrollHeight - scrollTop - clientHeight < NEAR_PX;
  }

  /** Draws, and stays at the end if it was there. */
  follow(draw) {
    const wasAtEnd = this.isAtEnd;
    draw();
    if (wasAtEnd) this.toEnd();
    else this.show();
  }

  toEnd() {
    this.element.scrollTop = this.element.scrollHeight;
    this.show();
  }

  show() {
    this.latest.hidden = this.isAtEnd;
  }
}
