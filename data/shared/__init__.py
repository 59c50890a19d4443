"""Files of a corpus or of prepared data, as all of ``data`` reads them."""
