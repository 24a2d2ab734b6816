// Deletes what a server has of a conversation, on a connection of its own.

/** What came instead of an answer: a refusal by the server, or the end of the connection. */
class Unanswered extends Error {
  constructor(message, code = null) {
    super(message);
    this.code = code;
  }
}

/** Delete all sessions of the tree that `handle` leads to but that one, which cannot delete itself: it is emptied.
 * `socket`: a new one, for a session that is there; closed at the end. Throws where the server refuses it. */
export async function erase(socket, handle) {
  const ask = (frame, answer) =>
    new Promise((resolve, reject) => {
      socket.onmessage = ({ data }) => {
        const event = JSON.parse(data);
        if (event.type === answer) resolve(event);
        else if (event.type === "error") reject(new Unanswered(event.error.message, event.error.code));
      };
      socket.onclose = () => reject(new Unanswered("The server is away: nothing was deleted."));
      if (frame) socket.send(JSON.stringify(frame));
      else socket.onopen = resolve;
    });
  try {
    await ask();
    const { session, running } = await ask({ type: "session.resume", handle }, "session.resumed");
    for (const response_id of running) await ask({ type: "response.cancel", response_id }, "response.done");
    const { sessions } = await ask({ type: "session.tree", limit: 1000 }, "session.tree.listed");
    for (const { id } of sessions) if (id !== session.id) await ask({ type: "session.prune", session: id }, "session.pruned");
    await ask({ type: "session.rewind", to: "root" }, "session.rewound");
  } finally {
    socket.close(1000);
  }
}
