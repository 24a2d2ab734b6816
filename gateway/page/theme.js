// The theme: as the system has it, or light, or dark. A plain script in the head, so that no wrong theme flashes.
(() => {
  const NEXT = { system: "light", light: "dark", dark: "system" };
  const root = document.documentElement;

  function kept() {
    try {
      return localStorage.getItem("holdfast.theme") ?? "system";
    } catch {
      return "system";
    }
  }

  function show(theme) {
    if (theme in NEXT && theme !== "system") root.dataset.theme = theme;
    else delete root.dataset.theme;
    const words = document.querySelector("#theme .words");
    if (words) words.textContent = `Theme: ${theme in NEXT ? theme : "system"}`;
  }

  show(kept());
  document.addEventListener("DOMContentLoaded", () => {
    show(kept());
    document.getElementById("theme")?.addEventListener("click", () => {
      const theme = NEXT[kept()] ?? "light";
      try {
        localStorage.setItem("holdfast.theme", theme);
      } catch {
        // kept for this view alone
      }
      show(theme);
    });
  });
})();
