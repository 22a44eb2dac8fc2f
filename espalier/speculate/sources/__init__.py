"""What proposes tokens beside the draft: paths of tokens, which are grafted onto the draft's trees in one place."""
