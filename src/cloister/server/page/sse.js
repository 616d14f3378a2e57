// Server-sent events (WHATWG HTML, 9.2), as far as chat streams use them: `data:` lines, an empty line ends an event. Pure.

/** Takes a stream piece by piece, cut anywhere, and returns the data of the events that are complete. */
export class EventParser {
  constructor() {
    this.rest = "";
    this.data = [];
  }

  push(piece) {
    const lines = (this.rest + piece).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line.startsWith("data:")) this.data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (line === "" && this.data.length) events.push(this.data.splice(0).join("\n"));
    }
    return events;
  }
}
