"""Questions on mailboxes: loaded, split by inbox, checked against a database, or made from one."""
