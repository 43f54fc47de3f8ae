"""How adapted models withstand adversarial attacks."""
