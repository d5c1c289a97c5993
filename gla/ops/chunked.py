from gla.ops.recurrent import recurrent
def chunked(q,k,v,g,s,cu,scale,chunk_size=None): return recurrent(q,k,v,g,s,cu,scale)
