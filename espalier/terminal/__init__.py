"""What every command shares: flags made from the config fields, tables and progress on the terminal, the machine."""
