// Light, dark, or as the system has it.

const KEY = "forerun-theme";
const NEXT = { system: "light", light: "dark", dark: "system" };

export function startTheme(button) {
  let theme = localStorage.getItem(KEY);
  if (!(theme in NEXT)) theme = "system";
  const show = () => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = NEXT[theme];
    localStorage.setItem(KEY, theme);
    show();
  });
  show();
}
