"""Prepares text as token shards, and reads token shards and image sets as data sets."""
