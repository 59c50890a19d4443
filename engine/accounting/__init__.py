"""Plans and counts the bytes and seconds of a step."""
