// The model's Markdown as elements. HTML in it is shown as text, pictures as links, and all is sanitised once more.

import { make } from "./dom.js";
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import DOMPurify from "./vendor/purify.es.mjs";

const REST = 4; // after a rendering of a running reply comes a pause of so many times its length
const SAFE = {
  ALLOWED_TAGS: "a blockquote br code em h1 h2 h3 h4 h5 h6 hr li ol p pre s strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["href", "align", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"], // they are no addresses
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

const markdown = new MarkdownIt({ breaks: true, linkify: true }).disable("image");
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
markdown.core.ruler.push("align", ({ tokens }) => {
  for (const token of tokens) {
    const style = token.attrGet("style"); // of a table's cell; the page's policy lets no style through
    if (style) token.attrs = [["align", style.slice("text-align:".length)]];
  }
});

/** The elements of these tokens. */
function elements(tokens) {
  const fragment = DOMPurify.sanitize(markdown.renderer.render(tokens, markdown.options, {}), SAFE);
  for (const link of fragment.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  return [...fragment.children].map((block) => {
    const shown = block.tagName === "TABLE" ? make("div", { className: "wide" }, block) : block;
    shown.dir = "auto";
    return shown;
  });
}

/** The index behind the first `count` lines of a text. */
function behind(text, count) {
  let at = 0;
  while (count--) at = text.indexOf("\n", at) + 1;
  return at;
}

/** A text that grows, in an element. Blocks that can change no more keep their elements: only the end is parsed again. */
export class Markdown {
  constructor(element) {
    this._element = element;
    this._next = 0; // when a running reply is rendered again
    this._begin();
  }

  _begin() {
    this._done = ""; // the text of the blocks that keep their elements
    this._open = []; // the elements of the others
    this._defined = false; // whether links are defined somewhere, perhaps behind their use
    this._element.replaceChildren();
  }

  /** Show `text`; `ended`: nothing follows. Returns whether it did: a running reply has to wait where that takes long. */
  show(text, ended) {
    const now = performance.now();
    if (!ended && now < this._next) return false;
    const lines = text.replace(/\r\n?/g, "\n");
    if (!lines.startsWith(this._done) || (ended && this._defined)) this._begin();
    const rest = lines.slice(this._done.length);
    const found = {};
    const tokens = markdown.parse(rest, found);
    this._defined = !ended && (this._defined || "references" in found);
    // [0, closed) cannot change | the last block grows, and may yet join the one before it, as an item a list
    const closed = ended ? 0 : Math.max(0, tokens.indexOf(tokens.filter((one) => one.level === 0 && one.map).at(-2)));
    for (const element of this._open) element.remove();
    this._element.append(...elements(tokens.slice(0, closed)));
    this._open = elements(tokens.slice(closed));
    this._element.append(...this._open);
    if (closed) this._done += rest.slice(0, behind(rest, tokens[closed].map[0]));
    this._next = performance.now() * (1 + REST) - now * REST;
    return true;
  }
}
