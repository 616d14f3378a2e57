// The line that says what becomes of what is sent. Once read it can be hidden; under another profile it is shown again.

import { byId, h } from "./dom.js";

export class PrivacyLine {
  /** @param page what the views share: memory and set(name, value). */
  constructor(page) {
    this.page = page;
    this.line = byId("privacy");
    this.shield = byId("show-privacy");
    byId("hide-privacy").addEventListener("click", () => {
      this.hide(true);
      this.shield.focus();
    });
    this.shield.addEventListener("click", () => {
      this.hide(false);
      byId("hide-privacy").focus();
    });
  }

  /** Says the profile that is in force and what it means. */
  say({ profile, summary }) {
    this.profile = profile;
    byId("privacy-text").replaceChildren(h("strong", {}, `Profile ${profile}.`), ` ${summary}`);
    const name = `Privacy: profile ${profile}`;
    this.shield.setAttribute("aria-label", name);
    this.shield.title = name;
    this.showKept();
    this.show();
  }

  /** Says that another profile let the page keep something here, and offers to delete it. */
  showKept() {
    const { memory } = this.page;
    const remove = () => {
      memory.deleteKept();
      this.showKept();
      this.page.toast("What was kept in this browser is deleted.");
      byId("message").focus();
    };
    const told = "Something is in this browser that another profile let this page keep. Under this one the page does not read it. ";
    byId("kept-before").hidden = !memory.hasUnread;
    byId("kept-before").replaceChildren(told, h("button", { type: "button", class: "text-button", onclick: remove }, "Delete it"));
  }

  /** Says that the profile is not known. That cannot be hidden. */
  fail(title) {
    byId("privacy-text").textContent = `${title}. What happens to what you send is not known.`;
    byId("hide-privacy").hidden = true;
  }

  hide(isHidden) {
    this.page.set("hidden_profile", isHidden ? this.profile : "");
    this.show();
  }

  show() {
    const isHidden = this.page.memory.settings.hidden_profile === this.profile;
    this.line.hidden = isHidden;
    this.shield.hidden = !isHidden;
  }
}
