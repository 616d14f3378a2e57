// What this page remembers. By default that ends with the page: only "keep on this device" writes anything down, and never a key.

import { newConversation } from "./conversation.js";
import { DEFAULTS } from "./settings.js";

const PLACE = "cloister";

/** Conversations and settings, and the one place where they may be kept. */
export class Memory {
  constructor(storage) {
    this.storage = storage;
    this.mayKeep = false; // until the profile is known
    this.settings = { ...DEFAULTS };
    this.conversations = [newConversation()];
    this.current = this.conversations[0];
  }

  /** Begins a conversation, unless the current one is empty still. */
  begin() {
    if (!this.current.turns.length) return;
    this.current = newConversation();
    this.conversations.unshift(this.current);
    this.write();
  }

  /** Takes in a conversation from elsewhere, and opens it. */
  add(conversation) {
    this.conversations.unshift(conversation);
    this.current = conversation;
    this.write();
  }

  /** Forgets a conversation; returns what brings it back. */
  forget(conversation) {
    const at = this.conversations.indexOf(conversation);
    const wasCurrent = this.current === conversation;
    this.conversations.splice(at, 1);
    if (!this.conversations.length) this.conversations.push(newConversation());
    if (wasCurrent) this.current = this.conversations[Math.min(at, this.conversations.length - 1)];
    this.write();
    return () => {
      this.conversations.splice(at, 0, conversation);
      if (wasCurrent) this.current = conversation;
      this.write();
    };
  }

  /** Forgets every conversation. */
  forgetAll() {
    this.current = newConversation();
    this.conversations = [this.current];
    this.write();
  }

  set(name, value) {
    this.settings = { ...this.settings, [name]: value };
    this.write();
  }

  /** Learns whether the privacy profile lets anything be kept; until then, and where it does not, nothing is read or written. */
  learnPolicy({ keeping }) {
    this.mayKeep = keeping === true;
    if (this.mayKeep) this.read();
  }

  /** Whether something lies in the storage that this profile does not let the page read. */
  get hasUnread() {
    try {
      return !this.mayKeep && Object.hasOwn(this.storage, PLACE);
    } catch {
      return false;
    }
  }

  /** Deletes what lies in the storage, unread. */
  deleteKept() {
    this.storage.removeItem(PLACE);
  }

  /** Writes everything down if the user wants it kept and the profile allows it; takes away what was kept if the user does not want it. */
  write() {
    if (!this.mayKeep) return;
    try {
      if (!this.settings.keep) this.storage.removeItem(PLACE);
      if (!this.settings.keep) return;
      const { settings, current } = this;
      const conversations = this.conversations.filter(({ turns }) => turns.length).map(withoutExchanges);
      this.storage.setItem(PLACE, JSON.stringify({ version: 1, settings, conversations, current: current.id }));
    } catch {
      // no storage, or no room in it: everything stays in memory
    }
  }

  read() {
    try {
      const kept = JSON.parse(this.storage.getItem(PLACE));
      if (kept?.version !== 1) return;
      this.settings = { ...DEFAULTS, ...kept.settings };
      if (!kept.conversations.length) return;
      const begun = this.conversations.filter(({ turns }) => turns.length); // while the profile was asked for
      this.conversations = [...begun, ...kept.conversations.map(ended)];
      this.current = begun[0] ?? this.conversations.find(({ id }) => id === kept.current) ?? this.conversations[0];
    } catch {
      this.storage?.removeItem(PLACE);
    }
  }
}

function withoutExchanges(conversation) {
  return eachTurn(conversation, (turn) => ({ ...turn, exchange: null }));
}

/** What was being answered when the page was left is not answered any more. */
function ended(conversation) {
  return eachTurn(conversation, (turn) => (["waiting", "streaming"].includes(turn.state) ? { ...turn, state: "stopped" } : turn));
}

/** A conversation with each of its turns changed, and the answers beside them. Turns of earlier versions of the page have fewer fields. */
function eachTurn(conversation, change) {
  const { title = "", folder = "" } = conversation;
  const changed = ({ files = [], label = "", variants = [], ...turn }) => change({ ...turn, files, label, variants: variants.map(changed) });
  return { ...conversation, title, folder, turns: conversation.turns.map(changed) };
}
