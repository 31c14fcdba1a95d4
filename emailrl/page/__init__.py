"""One HTML page of a run, a trajectory file or one trajectory: a single file that works offline. The page's sources
(``page.html``, ``page.css`` and the scripts) use no library and need no build: ``build.py`` joins them, stripped of
indentation and comments, for every page."""
