"""Training of an EAGLE-3 head on text that its target wrote: prompts, generation, corpus, loss, loop, card."""
