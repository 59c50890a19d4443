"""Programs for measurements that a page or a comment in the sources quotes."""
