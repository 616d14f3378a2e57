// The box that a message is written in: its height, its keys, and the files that go with it.

import { byId, h, icon, iconButton } from "./dom.js";
import { readFile } from "./files.js";

const MAX_HEIGHT = 0.4;

export class Composer {
  /**
   * @param page what the views share: api and toast(text).
   * @param onsend takes a text and its files; returns whether it took them.
   */
  constructor(page, onsend) {
    this.page = page;
    this.onsend = onsend;
    this.files = [];
    this.numReading = 0;
    this.message = byId("message");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.message.addEventListener("keydown", (event) => this.key(event));
    this.message.addEventListener("input", () => this.fit());
    this.message.addEventListener("paste", (event) => this.paste(event));
    byId("attach").addEventListener("click", () => byId("files").click());
    byId("files").addEventListener("change", ({ target }) => this.choose(target));
    for (const name of ["dragover", "drop"]) addEventListener(name, (event) => this.drop(event)); // elsewhere a file would replace the page
  }

  /** Sends what stands in the box, unless there is nothing or nobody takes it. */
  send() {
    const text = this.message.value.trim();
    if (this.numReading || (!text && !this.files.length) || !this.onsend(text, this.files)) return;
    this.message.value = "";
    this.files = [];
    this.fit();
    this.showFiles();
  }

  focus() {
    this.message.focus();
  }

  /** Shows the button that stops an answer in place of the one that sends. */
  showRunning(isRunning) {
    byId("stop").hidden = !isRunning;
    byId("send").hidden = isRunning;
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  /** Gives the box as many lines as its text has. */
  fit() {
    this.message.style.height = "auto";
    this.message.style.height = `${Math.min(this.message.scrollHeight, innerHeight * MAX_HEIGHT)}px`;
  }

  choose(input) {
    const files = [...input.files];
    input.value = "";
    return this.add(files);
  }

  /** Takes files that are dropped; text is left to the browser. */
  drop(event) {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    if (event.type === "drop") this.add([...event.dataTransfer.files]);
  }

  /** Takes files that are pasted. Office programs put a picture beside the text: then the text is meant. */
  paste(event) {
    const { files, types } = event.clipboardData ?? { files: [], types: [] };
    if (!files.length || types.includes("text/plain")) return;
    event.preventDefault();
    this.add([...files]);
  }

  /** Reads files; until that is done nothing is sent, so that none of them stays behind. */
  async add(files) {
    this.numReading += 1;
    for (const file of files) {
      try {
        this.files.push(await readFile(file, this.page.api));
      } catch (fault) {
        this.page.toast(fault.message);
      }
    }
    this.numReading -= 1;
    this.showFiles();
    this.focus();
  }

  showFiles() {
    byId("attached").hidden = !this.files.length;
    byId("attached").replaceChildren(...this.files.map((file) => this.chip(file)));
  }

  chip(file) {
    const remove = () => {
      this.files = this.files.filter((other) => other !== file);
      this.showFiles();
      this.focus();
    };
    return h("li", {}, icon("file"), h("span", {}, file.name), iconButton("close", `Take away: ${file.name}`, remove));
  }
}
