"""What models read in the lab: stories, text files or data sets, as token ids."""
