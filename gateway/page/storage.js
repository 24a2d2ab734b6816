// What this browser keeps beyond a page: small values by name, and the list of conversations.

const PREFIX = "holdfast.conversation.";
const MOST = 100; // conversations; the oldest go

/** The value with this name; null: none is kept. */
export function kept(name, store = () => localStorage) {
  try {
    return store().getItem(name);
  } catch {
    return null; // the browser has no storage for this page
  }
}

/** Keep a text by this name. Returns whether there was room for it. */
export function keep(name, value, store = () => localStorage) {
  try {
    store().setItem(name, value);
    return true;
  } catch {
    return false;
  }
}

/** For `kept` and `keep`: what is kept for this tab alone. */
export const tab = () => sessionStorage;

/** All conversations, the one that was used last first: `id`, `name`, `last`, `used` (milliseconds), `current`, `sessions`. */
export function conversations() {
  let names = [];
  try {
    names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  } catch {
    // none is kept
  }
  return names.map((name) => conversation(name.slice(PREFIX.length))).filter(Boolean).sort((one, other) => other.used - one.used);
}

/** The conversation with this id; null: it is not kept. */
export function conversation(id) {
  try {
    return JSON.parse(kept(PREFIX + id));
  } catch {
    return null;
  }
}

/** Keep a conversation; the oldest others make room for it. */
export function keepConversation(one) {
  const others = conversations().filter(({ id }) => id !== one.id);
  others.splice(MOST - 1).forEach(({ id }) => forgetConversation(id));
  while (!keep(PREFIX + one.id, JSON.stringify(one)) && others.length) forgetConversation(others.pop().id);
}

export function forgetConversation(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // it was not kept
  }
}

/** Call `act` when another tab has changed the list. */
export function onConversations(act) {
  addEventListener("storage", ({ key }) => (key === null || key.startsWith(PREFIX)) && act());
}
