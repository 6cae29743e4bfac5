"""Starting, watching and ending a whole run: placement of its processes, live table, summary and page."""
