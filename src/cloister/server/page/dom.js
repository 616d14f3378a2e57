// Builds elements. A child that is a string becomes a text node, so nothing that a model or a server says is ever read as markup.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const SVG = "http://www.w3.org/2000/svg";

/** Returns an element. `on...` attributes are listeners; true sets an empty attribute, false, null and undefined none. */
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Returns an SVG element. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** Returns a MathML element. */
export function mathml(name, attributes = {}, ...children) {
  return fill(document.createElementNS(MATHML, name), attributes, children);
}

/** Returns one of the drawings at the end of the page, hidden from assistive technology: the text beside it says what it means. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));
}

/** Returns a button with a drawing and a name. */
export function iconButton(name, label, onclick, attributes = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes }, icon(name));
}

/** What keeps a text field from the browser's helpers, which may send its text elsewhere. */
export const UNWATCHED = { autocomplete: "off", spellcheck: "false", writingsuggestions: "false" };

/** Returns the element of the page with that id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Gives an element these children. Those that are in their place already are not touched, and keep focus, scroll and selection. */
export function setChildren(element, children) {
  children.forEach((child, i) => {
    if (element.childNodes[i] !== child) element.insertBefore(child, element.childNodes[i] ?? null);
  });
  while (element.childNodes.length > children.length) element.lastChild.remove();
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
