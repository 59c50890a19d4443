"""Numbers of holders that follow from measured gradient noise."""
