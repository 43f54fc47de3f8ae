"""What runs show: figures, tables, reports and curves."""
