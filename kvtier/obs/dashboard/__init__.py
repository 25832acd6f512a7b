"""The dashboard: one page that shows what a server's figures say, and how they came about."""
