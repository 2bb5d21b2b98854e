// The theme that the user chose. Runs before the page is drawn, so that it never flashes in the other one.
{
  const stored = localStorage.getItem("quire.theme");
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
}
